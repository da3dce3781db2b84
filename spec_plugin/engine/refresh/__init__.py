"""The draft's weights in a running engine: where they lie, and how new ones get there, all or nothing."""
