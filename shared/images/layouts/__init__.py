"""The tokens of images in a prompt, as the processors of Transformers write them, without torch and Transformers.

A chat template writes a placeholder for each image. The processor of a model replaces it by the image token, once per
embedding that the vision tower gives, and by further tokens around them. Their number depends on the size of the image
alone, not on other images of the prompt.

The rules are those of Transformers 5.23. Processors write several images of a prompt one by one, except that of
LLaVA-OneVision: given the images of a conversation as a list of lists, it writes two or more of them without tiles.
The rule here is that for a flat list, where each image has its tiles, so that an image keeps its tokens when a
conversation goes on.
"""
