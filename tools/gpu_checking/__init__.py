"""Steps of the GPU check and the program that runs them."""
