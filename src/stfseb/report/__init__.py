"""Tables, figures and the page that show what runs found. Plots and templates load when they are needed."""

from stfseb.report.page import write_report
from stfseb.report.tables import main_table

__all__ = ["main_table", "write_report"]
