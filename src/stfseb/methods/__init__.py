"""The methods, one file each, with the same names in the same order; `base` holds the contract."""
