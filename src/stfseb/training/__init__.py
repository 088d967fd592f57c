"""Training: `fit`, its loop, early stopping and progress."""
