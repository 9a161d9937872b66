"""Testing services that use towpath: real servers, fault proxies, fixtures."""
