"""Attention kernels: one checked public function per operation, a readable reference beside each."""
