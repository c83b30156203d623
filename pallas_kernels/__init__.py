"""Accelerator kernels with one public function per operation, usable without the models."""

import warnings

# The notice is about the backend's future, and nothing a caller can act on.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
