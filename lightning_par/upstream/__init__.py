"""Private names of torch, Lightning, torchmetrics and transformers: the only uses of them.

A module is named after what it wraps, and imports nothing of lightning_par but `errors`; only
`lightning` imports Lightning. Each name says why no public one does the same. Names of modules and
classes are looked up when a module here is imported, attributes of instances when they are used;
where one is gone, `UpstreamError` says which and on which versions it was seen.
"""
