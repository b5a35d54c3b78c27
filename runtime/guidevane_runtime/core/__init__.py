"""The pure scheduler. It knows block counts and token ids; it never sees a tensor, an event loop or a clock."""
