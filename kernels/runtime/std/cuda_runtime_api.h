// Empty, because NVRTC declares the contents of this header itself.
#pragma once
