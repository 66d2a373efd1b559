"""The suites that come with ppbench: TOML files, read by `ppbench.suite`."""
