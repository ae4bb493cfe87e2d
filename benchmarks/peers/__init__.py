"""How peers are called. Nothing of a peer is here but its name and its arguments."""
