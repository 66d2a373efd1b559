"""The subcommands of the command line, each a plain function; `ppbench.cli` names them. Heavy imports stay inside."""
