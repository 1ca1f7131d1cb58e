"""Types, tree utilities and validation shared by all packages."""
