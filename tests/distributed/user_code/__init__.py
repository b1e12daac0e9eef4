"""Code as strangers write it, on meshes."""
