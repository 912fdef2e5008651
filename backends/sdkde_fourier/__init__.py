"""The Fourier backend: Gaussian sums in one to three dimensions without n·m work, on the CPU, through finufft."""
