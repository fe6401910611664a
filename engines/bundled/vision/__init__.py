"""A vision encoder: images of any size, packed into one pass, to one embedding per patch."""
