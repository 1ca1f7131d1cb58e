"""Reading the text of a compiled program (HLO), as the compilers for CPUs, GPUs and TPUs print it."""
