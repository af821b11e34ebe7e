"""The commands of `slipstream`, one module each. They read flags, call one room, and print."""
