"""The backends, one for each API of upstreams, behind one interface."""
