"""Adapters, one file per simulator; each imports its simulator at use."""
