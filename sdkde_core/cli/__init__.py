"""The command `sdkde`; imported by the console script only."""
