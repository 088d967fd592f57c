"""The command by the module's name."""

import subprocess
import sys


def test_python_m_is_the_command():
    right = subprocess.run([sys.executable, "-m", "stfseb", "--help"], capture_output=True, text=True, check=True)
    assert "compare" in right.stdout
    wrong = subprocess.run([sys.executable, "-m", "stfseb", "train", "nowhere.yaml"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("stfseb: error: ")
