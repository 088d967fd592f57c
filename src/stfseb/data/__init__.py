"""Data sets as data: registry, readers, corruptions, augmentation and the embedded task."""
