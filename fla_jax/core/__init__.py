"""What the ops share: choice of implementation, checked mode, names for rematerialisation."""
