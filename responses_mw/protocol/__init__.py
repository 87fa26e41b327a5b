"""The Responses protocol without I/O: no sockets, no clock, no await, only pure functions and state machines."""
