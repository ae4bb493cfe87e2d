"""What launchers share: launch tables by GPU, stretches, kept states."""
