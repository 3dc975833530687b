"""One slot: the Serve deployment class, its gate, its link to the coordinator, and the golden check."""
