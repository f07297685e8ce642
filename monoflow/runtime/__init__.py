"""What one rank does: runs its Program, talks to the others, starts and ends cleanly."""
