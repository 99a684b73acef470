"""Environments: coroutines, and the simulators behind them."""
