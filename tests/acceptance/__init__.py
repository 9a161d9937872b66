"""The product as a user runs it: real processes, real servers, one database and names of its own per test."""
