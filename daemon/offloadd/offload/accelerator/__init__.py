"""Devices behind one small interface: torch's streams and events, the CPU, and a simulated one."""
