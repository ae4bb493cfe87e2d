"""What several ops share: arguments, checks, decay trees, walks."""
