"""Encoders, the slow weights: one file each, registered by name."""

from fastweights.nn.encoders.base import ENCODERS, Encoder, images_to_float, register_encoder, twin
from fastweights.nn.encoders.cnn import CNN
from fastweights.nn.encoders.lstm import LSTM
from fastweights.nn.encoders.pixels import Pixels
from fastweights.nn.encoders.resnet import ResNet

__all__ = ["CNN", "ENCODERS", "LSTM", "Encoder", "Pixels", "ResNet", "images_to_float", "register_encoder", "twin"]
