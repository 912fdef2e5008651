"""Work on several devices, in several processes, from disk, and with Dask: one task list, and an executor for each."""
