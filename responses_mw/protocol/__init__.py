"""The Responses protocol, sans I/O: no socket, no clock, no await. Everything here is pure or a state machine that is fed."""
