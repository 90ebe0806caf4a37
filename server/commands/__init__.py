"""The subcommands of `kaon` other than `kaon serve`, one module each. `server.cli` runs them."""
