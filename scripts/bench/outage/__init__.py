"""The figures that outages of other servers are measured by, each with its bar."""
