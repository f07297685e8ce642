"""Pages to look at, made from data: no scripts, nothing fetched."""
