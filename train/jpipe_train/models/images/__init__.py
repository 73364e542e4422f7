"""Models of images: AlexNet, VGG-16, ResNet-50 and Inception-v3."""
