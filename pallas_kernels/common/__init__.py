"""What every kernel folder shares: dispatch, tuning tables, version differences of jax, testing."""
