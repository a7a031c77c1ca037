"""The fast CPU kernels: C sources, the compiler call, the calls into the library."""
