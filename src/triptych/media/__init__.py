"""From what a client sent to pixels: limits first, then bytes, then one upright opaque RGB picture."""
