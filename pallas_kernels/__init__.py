"""Accelerator kernels with one public function per operation, usable without the models."""
