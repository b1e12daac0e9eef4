"""The processes of a run: launching, rendezvous, the mesh, watching for ranks that died."""
