"""One module per subcommand: its options, and what it does with them."""
