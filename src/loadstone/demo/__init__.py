"""The demo: a small real model and three adapters, made here, served from a store, asked side by side."""
