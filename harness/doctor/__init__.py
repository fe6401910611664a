"""The doctor: is the mode you think is on really on? Reads launch files; runs none of them."""
