"""The figures by which outages of other servers are measured, each with its bar."""
