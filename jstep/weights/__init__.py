"""Loading and saving of weights in the safetensors format, as used by Hugging Face; loading from checkpoints."""
