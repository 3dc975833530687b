"""The checks, by subject: each is a pure function from a node's facts, and what is to run there, to one finding."""
