"""A saved classifier behind HTTP: `stfseb serve MODEL`. An extra, `pip install 'stfseb[serve]'`."""
