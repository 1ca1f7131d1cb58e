"""Parsing and analysis of compiled programs (HLO), as printed by the compilers for CPUs, GPUs and TPUs."""
