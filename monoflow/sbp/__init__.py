"""How a tensor lies along one axis (SBP), and the rules that say which layouts an op maps exactly."""
